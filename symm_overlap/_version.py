"""The version of this package: what is kept in files is kept for one version."""

VERSION = "0.1.0"
