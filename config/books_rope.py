# the twin of config/books_nope.py with RoPE: give it after books_nope.py
out_dir = 'out/books/rope'
position = 'rope'
