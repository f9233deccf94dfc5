"""What happened in a compile, and why."""
