"""What each architecture wants, with the evidence."""
