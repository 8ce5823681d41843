"""What is trained: `mlp`, `lora` and the owner's own `script`, in one worker program for both legs.

Laws: training frameworks are imported inside the workload that needs them, never by `params`, which
checks job files on machines without any; nothing here is trusted with more than plaintext.
"""
