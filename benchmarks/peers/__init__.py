"""What a user of PyTorch on MPI would use instead, each at its best settings."""
