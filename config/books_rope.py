# the twin of config/books_nope.py with RoPE: give it after books_nope.py
out_dir = 'out/books/1337/rope'
position = 'rope'
