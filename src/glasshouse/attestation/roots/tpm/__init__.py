"""TPM 2.0: a quote over the boot chain, by a key that lies in a TPM whose maker or owner the policy names."""
