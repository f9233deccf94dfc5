"""What a user sees of an `Explanation`: text, JSON, HTML, annotations. Each only reads it."""
