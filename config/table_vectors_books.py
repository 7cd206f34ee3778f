# Small vectors beside the scales, on the books at 5M parameters: first the commands in results/vectors_books/run.sh
# python eval_ppl.py config/table_vectors_books.py
out_dir = 'out/books'
lengths = [256, 512, 1024, 1536]  # tuned at 1024
max_windows = 512
batch_tokens = 32768
_nope = 'out/books/nope/last.pt'
table = [{'name': 'NoPE', 'init_from': _nope}, {'name': 'RoPE', 'init_from': 'out/books/rope/last.pt'},
         {'name': 'NoPE, uniform scale', 'init_from': _nope, 'scale': 'out/books/nope/scale_uniform.json'}]
table += [{'name': f'NoPE, {_tune}', 'init_from': _nope, 'scale': f'out/books/nope/scale_head_1024_{_tune}.json'}
          for _tune in ('scale', 'scale,out', 'norm', 'scale,out,norm')]
table += [{'name': f'NoPE, every weight, lr {_lr}', 'init_from': f'out/books/full_{_lr}/last.pt'}
          for _lr in ('1e-4', '4e-4', '1e-3')]
table += [{'name': 'RoPE, PI fair', 'init_from': 'out/books/pi/last.pt'},
          {'name': 'RoPE, YaRN fair', 'init_from': 'out/books/yarn/last.pt'}]
