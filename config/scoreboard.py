# 0.9M parameters on long books, L = 128 bytes, for results/scoreboard: train.py's defaults in
# everything else. First: python data/books/prepare.py FOLDER
dataset = 'books'
