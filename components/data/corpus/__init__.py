"""The built-in corpus: scenes drawn by the project, text about them, the web's ills, and a server for it all."""
