# DAPE V2, Figure 3: the same number of tokens in training windows of 128, 256 or 512
# python eval_ppl.py config/dape/table_small.py config/dape/table_equal_tokens.py
label = 'equal_tokens'
lengths = [128, 256, 512, 1024, 2048]
n_samples = 32
table = [{'name': f'{name}, trained at {T}', 'init_from': f'out/dape/{run}{end}/last.pt'}
         for run, name in (('kerple', 'Kerple'), ('kerple_1x3', 'DAPE 1x3-Kerple'))
         for T, end in ((128, ''), (256, '_256'), (512, '_512'))]
