# What reads past L, from the project's root. First: python data/code/prepare.py
# It goes on where it was stopped. Start it in two shells for two cores, with OMP_NUM_THREADS=1 each.
#   MODELS=conv,none   only these models
#   SERIES=books       on books, after: python data/books/prepare.py FOLDER --tokenizer=bpe:1024
#                      --out_dir=data/books_1024. Other series: books_40M, tokens_40M,
#                      size_5M, parts. On a GPU: code_86M, and books_32M, after: python
#                      data/books/prepare.py FOLDER --tokenizer=bpe:8192 --out_dir=data/books_bpe
#   SERIES=mix_20M     trained on both, after: python data/books/prepare.py FOLDER
#                      --tokenizer=data/code/bpe_1024.tiktoken --out_dir=data/books_code.
#                      mix_20M_on_books reads books; mix, mix_on_books: the same with 10M tokens;
#                      mix_5M, mix_5M_on_books: 5M parameters;
#                      code_on_books: trained on code, read on books
set -e
python -m results.past_L.table --series="${SERIES:-code}" --models="[$(echo "$MODELS" | sed "s/[^,]\{1,\}/'&'/g")]"
