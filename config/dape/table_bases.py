# DAPE V2, Figures 5 and 6: DAPE 1x3 on other biases, and what it reads where it sees the tokens that it is to predict
# python eval_ppl.py config/dape/table_small.py config/dape/table_bases.py
label = 'bases'
lengths = [128, 256, 512, 1024, 2048]
n_samples = 32
_names = {'alibi': 'ALiBi', 'alibi_1x3': 'DAPE 1x3-ALiBi', 'alibi_1x3_cheat': 'DAPE 1x3-ALiBi that cheats',
          'fire': 'FIRE', 'fire_1x3': 'DAPE 1x3-FIRE', 'fire_1x3_cheat': 'DAPE 1x3-FIRE that cheats',
          'kerple': 'Kerple', 'kerple_1x3': 'DAPE 1x3-Kerple', 'kerple_1x3_cheat': 'DAPE 1x3-Kerple that cheats'}
table = [{'name': name, 'init_from': f'out/dape/{run}/last.pt'} for run, name in _names.items()]
