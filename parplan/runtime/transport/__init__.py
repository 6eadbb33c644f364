"""Transport of tensor blocks: copies in one process, torch.distributed messages between processes."""
