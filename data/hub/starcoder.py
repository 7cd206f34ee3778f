# StarCoderData in all languages, the smaller part of the paper's pretraining data (Section 4.1). It
# has only a train split, because the paper validates on SlimPajama. It is gated: first accept its
# terms on its page and log in. Sources: Li et al. 2023, arXiv:2305.06161;
# scripts/prepare_starcoder.py of jzhang38/TinyLlama.
# hf auth login && python data/hub/prepare.py data/hub/starcoder.py
# python data/hub/prepare.py data/hub/starcoder.py --local=FOLDER --max_tokens=10_000_000   # a part
repo = 'bigcode/starcoderdata'  # its main branch, because we knew no commit
field = 'content'
out_dir = 'data/starcoder'
