"""The gates that release package keys: those an owner added, and the embedded one."""
