"""Settings of kvcascade, and the errors that every package shares."""

# Read by the build (pyproject.toml) too. A constant, because looking up installed metadata costs 30 ms.
VERSION = "0.1.0"
