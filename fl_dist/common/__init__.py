"""What everything else may use: words, paths, files of data, named builders, random numbers, the terminal."""
