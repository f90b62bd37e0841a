"""Used everywhere: errors, formatting, paths, YAML files, named builders, random numbers, the terminal."""
