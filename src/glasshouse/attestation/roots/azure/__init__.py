"""Azure's confidential VMs: a vTPM's quote, by a key that the processor's report names."""
