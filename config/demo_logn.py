# the demo model's twin whose queries grow with the logarithm of the position, from training on
out_dir = 'out/demo/logn'
position = 'logn'
