"""Show an `Explanation` to a user as text, JSON, HTML or annotations. Each only reads it."""
