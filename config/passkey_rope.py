# the twin of config/passkey_nope.py with RoPE: give it after passkey_nope.py
out_dir = 'out/passkey/rope'
position = 'rope'
