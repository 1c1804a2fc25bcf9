"""FSDP with a fused cross-entropy kernel: the serial baseline as verl runs it with flash-attn."""
