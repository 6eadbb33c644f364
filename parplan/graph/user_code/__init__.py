"""Autograd Functions, tensor hooks and module hooks of the forward, as ops that call the user's code."""
