"""Work, saved tensors and efficiency of single ops."""
