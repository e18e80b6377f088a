"""Parts of the training program that a first reader can leave out."""
