"""AMD SEV-SNP: a report of the processor about the machine that it launched, by a key of that chip and firmware."""
