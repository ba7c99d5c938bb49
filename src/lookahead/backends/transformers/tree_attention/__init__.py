"""Tree attention: a step's tokens attend to the cached text and to their ancestors, without a dense mask."""
