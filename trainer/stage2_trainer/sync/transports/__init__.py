"""Both ends of each transport: TCP and NCCL."""
