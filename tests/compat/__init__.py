"""The compatibility tests. A package, so that their servers end with them and not with the whole run."""
