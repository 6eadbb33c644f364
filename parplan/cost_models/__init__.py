"""What layers, transfers and memory cost, and where each number comes from."""
