"""What a runtime is measured to: its parts, their files, and what starts with its interpreter."""
