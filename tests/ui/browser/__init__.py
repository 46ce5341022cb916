"""The dashboard in a browser. A package, so that browser and cluster end with its tests and not with the run."""
