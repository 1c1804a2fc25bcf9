"""PyTorch FSDP and ZeRO as trainer and scorer: the serial baseline."""
