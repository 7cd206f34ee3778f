# The position methods of DAPE V2 at small size, in the layout of its Figure 2: first the commands in
# results/dape_small/run.sh
# python eval_ppl.py config/dape/table_small.py
out_dir = 'out/dape'
protocol = 'last'
lengths = [128, 256, 512, 1024, 2048, 4096, 8192]
last = 256
n_samples = 16
batch_tokens = 16384
_names = {'none': 'NoPE', 'rope': 'RoPE', 't5': 'T5 bias', 'alibi': 'ALiBi', 'kerple': 'Kerple', 'fire': 'FIRE',
          'cope': 'CoPE', 'xl': 'Transformer-XL', 'none_1x1': 'DAPE-NoPE', 'none_1x3': 'DAPE 1x3-NoPE',
          'rope_1x1': 'DAPE-RoPE', 'rope_1x3': 'DAPE 1x3-RoPE', 'kerple_1x1': 'DAPE-Kerple',
          'kerple_1x3': 'DAPE 1x3-Kerple'}
table = [{'name': name, 'init_from': f'out/dape/{run}/last.pt'} for run, name in _names.items()]
