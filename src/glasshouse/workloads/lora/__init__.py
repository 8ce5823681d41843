"""The `lora` workload: records to tokens, a model from its files, and the training of an adapter."""
