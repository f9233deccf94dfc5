"""What a compile did, as data."""
