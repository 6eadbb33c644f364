"""Pipeline stages: a program's steps by the group of devices that takes them, and the order of micro-batches."""
