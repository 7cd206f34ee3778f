# DAPE V2, Tables 4 and 5 and Appendix E: kernel sizes, and channels between the convolutions, on Kerple
# python eval_ppl.py config/dape/table_small.py config/dape/table_kernels.py
label = 'kernels'
lengths = [128, 256, 512, 1024, 2048]
n_samples = 32
_names = {'kerple': 'Kerple', 'kerple_1x1': 'DAPE-Kerple', 'kerple_1x1_w64': 'DAPE-Kerple, 64 channels',
          'kerple_1x3': 'DAPE 1x3-Kerple', 'kerple_1x5': 'DAPE 1x5-Kerple', 'kerple_1x7': 'DAPE 1x7-Kerple',
          'kerple_1x3_w10': 'DAPE 1x3-Kerple, 10 channels', 'kerple_1x3_w21': 'DAPE 1x3-Kerple, 21 channels',
          'kerple_1x3_w64': 'DAPE 1x3-Kerple, 64 channels'}
table = [{'name': name, 'init_from': f'out/dape/{run}/last.pt'} for run, name in _names.items()]
