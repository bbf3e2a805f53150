"""From one process to many nodes on PyTorch's own engine: DeviceMesh, FSDP2, pipelining, DCP, torchrun."""
