"""
Corpora of Parquet or JSON-lines files, from the Hugging Face hub or a local folder, made into token files: what
data/{slimpajama,starcoder,pg19,proof_pile,arxiv}/prepare.py share.

Each file becomes a part in out_dir/parts.part, itself a small dataset of one split, by one of several processes that
read it as a stream; then the parts are joined in order. A part is written whole or not at all, so a run that was killed
goes on with the files that it had not finished, and ends with the same bytes.
"""

import contextlib
import glob
import hashlib
import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from corpus import get_tokenizer, key_of, open_tokens, tokenizer_digest, tokenizer_from_state, tokenizer_state
from corpus import write_corpus as write_part_corpus
from runtime import ROOT, Progress, save_json
