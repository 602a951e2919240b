"""`tenuto profile`: how long a live server's steps take."""
