# the demo model's twin with RoPE: train.py's defaults in everything else
out_dir = 'out/demo/rope'
position = 'rope'
