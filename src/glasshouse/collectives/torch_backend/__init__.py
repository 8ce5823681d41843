"""The backend `sealed` as torch.distributed sees it: its entry point, its process group, and what it refuses.

Law: importing this package imports nothing else; torch calls `entry` while it is being imported itself.
"""
