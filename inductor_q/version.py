"""Hold the version of the package, for what it writes and for what it reads back."""

VERSION = "0.1.0"
