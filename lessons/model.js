// The model in a browser: model.py in another language. Read Model.read() from top to bottom.
// It has a tokenizer, arithmetic, the model, and the jobs that the page gives it in a Web Worker.
// It uses no library, and also runs under node: const {Model, Tokenizer} = require('./model.js').
// Names are those of model.py: T tokens in this call, C = n_embd, H = n_head, D = head_dim = C / H,
// V = vocab_size, G = n_kv_head. Arrays are flat: of x, (T, C), x[t * C + c] is token t, channel c.
'use strict';

// ---------------------------------------------------------------------- tokenizer

// The pattern that cuts text into words, tokenizer.py's PATTERN in JavaScript's notation. In
// JavaScript, \s would lack the character U+0085 and include U+FEFF. Ignoring case, s is also ſ.
const WORDS = new RegExp([
  "'(?:[sSſdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])", '[^\\r\\n\\p{L}\\p{N}]?\\p{L}+', '\\p{N}{1,3}',
  ' ?[^\\p{White_Space}\\p{L}\\p{N}]+[\\r\\n]*', '\\p{White_Space}*[\\r\\n]+',
  '\\p{White_Space}+(?!\\P{White_Space})', '\\p{White_Space}+'].join('|'), 'gu');

class Tokenizer {
  // state: {kind: 'bpe' or 'bytes', ranks: [base64 of the bytes of each token], eot}
  constructor({kind, ranks, eot}) {
    // A string stands for bytes here: each of its characters is one byte.
    Object.assign(this, {kind, eot, bytes: ranks.map(text => atob(text))});
    this.rank = new Map(this.bytes.map((bytes, id) => [bytes, id]));
  }

  encode(text, most = Infinity) {
    const ids = [];
    // A byte tokenizer has no merges, so where it cuts does not matter.
    for (const [word] of this.kind === 'bytes' ? [[text]] : text.matchAll(WORDS)) {
      const bytes = Array.from(new TextEncoder().encode(word), byte => String.fromCharCode(byte));
      const tokens = this.kind === 'bytes' ? bytes : this.merge(bytes);
      ids.push(...tokens.map(token => this.rank.get(token)));
      if (ids.length >= most) break;
    }
    return ids.slice(0, most);
  }

  // Join the two neighbors that make the token of the lowest rank, until no two make a token.
  merge(parts) {
    const rankAt = n => n + 1 < parts.length ? this.rank.get(parts[n] + parts[n + 1]) : undefined;
    const ranks = parts.map((_, n) => rankAt(n) ?? Infinity); // of n and n + 1 joined
    for (;;) {
      const place = ranks.indexOf(Math.min(...ranks));
      if (!(ranks[place] < Infinity)) return parts;
      parts.splice(place, 2, parts[place] + parts[place + 1]);
      ranks.splice(place, 1);
      for (const n of [place - 1, place]) if (n >= 0) ranks[n] = rankAt(n) ?? Infinity;
    }
  }

  decode(ids) {
    const bytes = ids.map(id => id === this.eot ? '<|endoftext|>' : this.bytes[id] ?? '').join('');
    return new TextDecoder('utf-8', {ignoreBOM: true}).decode(toBytes(bytes));
  }
}

// ---------------------------------------------------------------------- arithmetic
const toBytes = text => Uint8Array.from(text, character => character.charCodeAt(0));
// A tensor from base64: numbers in float32, or in 8 bits with one float32 scale for each row.
function unpack({shape, numbers, rows}) {
  const bytes = toBytes(atob(numbers)).buffer, width = shape[1];
  if (!rows) return new Float32Array(bytes);
  const small = new Int8Array(bytes), scales = new Float32Array(toBytes(atob(rows)).buffer);
  return Float32Array.from(small, (number, n) => number * scales[Math.floor(n / width)]);
}

// y = x W^T, a linear layer without bias. x: (T, n_in); W: (n_out, n_in). Returns (T, n_out).
// Four tokens at a time, so that each weight is loaded once for four products.
function linear(x, W, T, n_in, n_out) {
  const y = new Float32Array(T * n_out);
  let t = 0;
  for (; t + 4 <= T; t += 4) {
    const a = t * n_in, b = a + n_in, c = b + n_in, d = c + n_in;
    for (let o = 0; o < n_out; o++) {
      let ya = 0, yb = 0, yc = 0, yd = 0;
      for (let n = 0, w = o * n_in; n < n_in; n++, w++) {
        const weight = W[w];
        ya += weight * x[a + n];
        yb += weight * x[b + n];
        yc += weight * x[c + n];
        yd += weight * x[d + n];
      }
      const at = t * n_out + o;
      [y[at], y[at + n_out], y[at + 2 * n_out], y[at + 3 * n_out]] = [ya, yb, yc, yd];
    }
  }
  for (; t < T; t++)
    for (let o = 0; o < n_out; o++) y[t * n_out + o] = dot(x, t * n_in, W, o * n_in, n_in);
  return y;
}

function dot(a, from_a, b, from_b, n) {
  let sum = 0;
  for (let k = 0; k < n; k++) sum += a[from_a + k] * b[from_b + k];
  return sum;
}

// Divide each token by its root mean square, and multiply each channel by its weight. x: (T, C).
function rmsNorm(x, weight, eps) {
  const C = weight.length, y = new Float32Array(x.length);
  for (let from = 0; from < x.length; from += C) {
    const factor = 1 / Math.sqrt(dot(x, from, x, from, C) / C + eps);
    for (let c = 0; c < C; c++) y[from + c] = x[from + c] * factor * weight[c];
  }
  return y;
}

function addTo(x, y) { for (let n = 0; n < x.length; n++) x[n] += y[n]; }

// Replace scores[0 ... n - 1] by their softmax. Returns its entropy in nats.
function softmax(scores, n) {
  let most = -Infinity, sum = 0, weighted = 0;
  for (let j = 0; j < n; j++) if (scores[j] > most) most = scores[j];
  for (let j = 0; j < n; j++) {
    const score = scores[j] - most, weight = Math.exp(score);
    scores[j] = weight;
    sum += weight;
    if (weight) weighted += weight * score;
  }
  for (let j = 0; j < n; j++) scores[j] /= sum;
  return Math.log(sum) - weighted / sum;
}

// ---------------------------------------------------------------------- model

class Model {
  // packed: {config, tensors: {name: see unpack()}, rope: for each layer null, or {frequency
  // (D / 2), factor}}. config: that of model.py. Names of tensors are those of model.py, too.
  constructor({config, tensors, rope}) {
    Object.assign(this, {config, rope, D: config.n_embd / config.n_head, w: {}});
    for (const name in tensors) this.w[name] = unpack(tensors[name]);
    this.w['head.weight'] ??= this.w['embed.weight']; // tied: both are one matrix
  }

  // What the model keeps of the tokens that it has read: keys, values, and what the page shows.
  newCache(capacity) {
    const {n_layer, n_head: H, n_kv_head: G, n_embd: C, short_conv} = this.config, {D} = this;
    const floats = n => new Float32Array(n * capacity);
    return {
      length: 0, capacity,
      hidden: floats(C),                        // (capacity, C), the input of the output matrix
      layers: Array.from({length: n_layer}, () => ({
        k: floats(G * D), v: floats(G * D),     // (G, capacity, D)
        q: floats(C),                           // (capacity, H, D), times scale / sqrt(D)
        entropy: floats(H),                     // (capacity, H), in nats
        ...short_conv && {A: floats(C), C: floats(C)}, // (capacity, C), convolutions read them
      })),
    };
  }

  // Read `ids` after the tokens in the cache. scales: (n_layer, H), one softmax scale per head.
  read(ids, cache, scales) {
    const {n_embd: C, n_layer, n_hidden, norm_eps} = this.config, T = ids.length, {w} = this;
    let x = new Float32Array(T * C);
    ids.forEach((id, t) => x.set(w['embed.weight'].subarray(id * C, id * C + C), t * C));

    for (let layer = 0; layer < n_layer; layer++) {
      const of = name => w[`blocks.${layer}.${name}`], kept = cache.layers[layer];
      let h = rmsNorm(x, of('attn_norm.weight'), norm_eps);
      h = this.shortConv(h, of('attn_conv.w'), kept.A, cache.length);
      const attended = this.attend(h, layer, cache, scales);
      addTo(x, linear(attended, of('attn.out.weight'), T, C, C));

      h = rmsNorm(x, of('mlp_norm.weight'), norm_eps);
      h = this.shortConv(h, of('mlp_conv.w'), kept.C, cache.length);
      const gateUp = linear(h, of('mlp.gate_up.weight'), T, C, 2 * n_hidden);
      const inner = new Float32Array(T * n_hidden);
      for (let t = 0; t < T; t++)
        for (let n = 0; n < n_hidden; n++) {
          const gate = gateUp[2 * t * n_hidden + n], up = gateUp[(2 * t + 1) * n_hidden + n];
          inner[t * n_hidden + n] = gate / (1 + Math.exp(-gate)) * up;
        }
      addTo(x, linear(inner, of('mlp.out.weight'), T, n_hidden, C));
    }
    cache.hidden.set(rmsNorm(x, w['norm.weight'], norm_eps), cache.length * C);
    cache.length += T;
  }

  // y_t = x_t + sum over tau of w_tau x_(t - tau): each channel has its own weights. x: (T, C);
  // weights: (short_conv, C), none if the model has no such convolution; kept: all inputs so far.
  shortConv(x, weights, kept, past) {
    if (!weights) return x;
    const C = this.config.n_embd, y = x.slice();
    kept.set(x, past * C);
    for (let tau = 0; tau < weights.length / C; tau++)
      for (let n = 0; n < x.length; n++) {
        const from = past * C + n - tau * C;
        if (from >= 0) y[n] += weights[tau * C + n % C] * kept[from];
      }
    return y;
  }

  // Attention of T new tokens to themselves and all tokens before them. x: (T, C). Returns (T, C).
  attend(x, layer, cache, scales) {
    const {n_head: H, n_kv_head: G, n_embd: C} = this.config, {D} = this, {length: past} = cache;
    const T = x.length / C, width = (H + 2 * G) * D, kept = cache.layers[layer];
    const qkv = linear(x, this.w[`blocks.${layer}.attn.qkv.weight`], T, C, width);
    for (let t = 0; t < T; t++) {
      const from = t * width, i = past + t;
      for (let head = 0; head < H + G; head++) this.turn(qkv, from + head * D, i, layer);
      for (let n = 0; n < C; n++)
        kept.q[i * C + n] = qkv[from + n] * scales[layer * H + Math.floor(n / D)] / Math.sqrt(D);
      for (let g = 0; g < G; g++) {
        const key = from + (H + g) * D, value = key + G * D, to = (g * cache.capacity + i) * D;
        kept.k.set(qkv.subarray(key, key + D), to);
        kept.v.set(qkv.subarray(value, value + D), to);
      }
    }

    const y = new Float32Array(T * C), weights = new Float64Array(past + T);
    for (let head = 0; head < H; head++) {
      const group = Math.floor(head * G / H) * cache.capacity * D;
      for (let t = 0; t < T; t++) {
        const i = past + t, to = t * C + head * D;
        kept.entropy[i * H + head] = this.weigh(weights, layer, head, i, cache);
        for (let j = 0, from = group; j <= i; j++, from += D) {
          const weight = weights[j];
          for (let d = 0; d < D; d++) y[to + d] += weight * kept.v[from + d];
        }
      }
    }
    return y;
  }

  // RoPE: turn each pair (x[k], x[k + D/2]) of a head by an angle that grows with position i.
  turn(x, from, i, layer) {
    if (!this.rope[layer]) return; // NoPE turns nothing
    const {frequency, factor} = this.rope[layer], half = this.D / 2;
    for (let k = 0; k < half; k++) {
      const cos = Math.cos(i * frequency[k]) * factor, sin = Math.sin(i * frequency[k]) * factor;
      const a = x[from + k], b = x[from + half + k];
      x[from + k] = a * cos - b * sin;
      x[from + half + k] = b * cos + a * sin;
    }
  }

  // Put into weights[0 ... i] what a head at position i gives to each token. Returns the entropy.
  weigh(weights, layer, head, i, cache) {
    const {n_head: H, n_kv_head: G, n_embd: C} = this.config, {D} = this;
    const {q, k} = cache.layers[layer], from = i * C + head * D;
    const group = Math.floor(head * G / H) * cache.capacity * D;
    for (let j = 0; j <= i; j++) weights[j] = dot(q, from, k, group + j * D, D);
    return softmax(weights, i + 1);
  }

  // Probabilities of all tokens after position i, (V,).
  next(cache, i, temperature = 1) {
    const {vocab_size: V, n_embd: C} = this.config;
    const hidden = cache.hidden.subarray(i * C, i * C + C);
    const logits = Float64Array.from(
      linear(hidden, this.w['head.weight'], 1, C, V), logit => logit / temperature);
    softmax(logits, V);
    return logits;
  }

  // -ln p of the tokens that follow positions from ... to - 1, in nats. ids: of the whole text.
  losses(cache, ids, from, to) {
    const {vocab_size: V, n_embd: C} = this.config, n = to - from;
    const logits = linear(cache.hidden.subarray(from * C, to * C), this.w['head.weight'], n, C, V);
    return Array.from({length: n}, (_, t) => {
      const p = Float64Array.from(logits.subarray(t * V, t * V + V));
      softmax(p, V);
      return -Math.log(p[ids[from + t + 1]]);
    });
  }
}

// A text as one model reads it with some scales. With `cut`, each token beyond L is predicted from
// at most the last L tokens, in pieces of L / 8 tokens, as eval_ppl.py does it.
class Reading {
  constructor(model, scales, cut, capacity) {
    const L = model.config.block_size, whole = model.newCache(cut ? L : capacity);
    // losses: of token i + 1, for each position i
    Object.assign(this, {model, scales, cut, L, whole, ids: [], losses: []});
  }

  // Go on with another text: forget everything from the first token on that differs.
  follow(ids) {
    let same = 0;
    while (same < this.ids.length && this.ids[same] === ids[same]) same++;
    if (same < this.ids.length) this.window = null;
    this.ids = ids;
    this.whole.length = Math.min(this.whole.length, same);
    this.losses.length = Math.min(this.losses.length, Math.max(0, same - 1));
  }

  // The cache that has read position i, its place there, and the position where the cache begins.
  at(i) {
    const {L, model} = this, inWhole = !this.cut || i < L, piece = Math.max(1, L >> 3);
    const end = inWhole ? i + 1 : L + piece * (1 + Math.floor((i - L) / piece));
    const from = inWhole ? 0 : end - L;
    if (!inWhole && this.window?.from !== from) this.window = {from, cache: model.newCache(L)};
    const cache = inWhole ? this.whole : this.window.cache, done = from + cache.length;
    if (done <= i) model.read(this.ids.slice(done, end), cache, this.scales);
    return {cache, place: i - from, from};
  }

  // Read up to 16 tokens more. Returns the losses of these, an empty list at the end.
  step() {
    const first = this.losses.length, piece = Math.max(1, this.L >> 3);
    let last = Math.min(first + 16, this.ids.length - 1);
    if (this.cut) // not past the end of a piece; up to L there is one piece
      last = Math.min(last, first < this.L ? this.L : first + piece - (first - this.L) % piece);
    if (last <= first) return [];
    const {cache, place, from} = this.at(last - 1);
    const found = this.model.losses(cache, this.ids.slice(from), first - from, place + 1);
    this.losses.push(...found);
    return found;
  }
}

// ---------------------------------------------------------------------- jobs of the page

const models = [], readings = new Map();

// Readings stay, so that a changed text is only read from its change on. The oldest ones go.
function readingOf({text, model, scales, cut, ids, capacity}) {
  const key = JSON.stringify([text, model, scales, cut, capacity]);
  const reading = readings.get(key) ?? new Reading(models[model], scales, cut, capacity);
  readings.delete(key);
  readings.set(key, reading);
  if (readings.size > 8) readings.delete(readings.keys().next().value);
  reading.follow(ids);
  return reading;
}

// Each job yields its answers one by one. Between them, other jobs get their turn.
const JOBS = {
  // All losses of a text, from its beginning on. Another job may read ahead, or end this Reading.
  *read(asked) {
    for (let told = 0; told < asked.ids.length - 1;) {
      const reading = readingOf(asked), from = told;
      if (reading.losses.length <= told) reading.step();
      told = Math.max(told, reading.losses.length);
      yield told > from ? {from, losses: reading.losses.slice(from)} : null;
    }
    yield {done: true};
  },

  // What was expected at token i, and what one head attends to where it is predicted.
  *look(asked) {
    while (!asked.cut && readingOf(asked).losses.length < asked.i - 1) {
      readingOf(asked).step();
      yield null;
    }
    const {cache, place, from} = readingOf(asked).at(asked.i - 1);
    const model = models[asked.model], p = model.next(cache, place);
    const likely = Array.from(p.keys()).sort((a, b) => p[b] - p[a]).slice(0, 6);
    const attention = new Float64Array(place + 1);
    const entropy = model.weigh(attention, asked.layer, asked.head, place, cache);
    yield {i: asked.i, likely: likely.map(id => [id, p[id]]), p: p[asked.ids[asked.i]],
           attention: Array.from(attention), from, entropy};
  },

  // Write on: draw n tokens, each from the model's distribution. temperature 0: the likeliest.
  *write(asked) {
    let ids = asked.ids, state = asked.seed;
    for (let n = 0; n < asked.n; n++) {
      const {cache, place} = readingOf({...asked, ids}).at(ids.length - 1);
      const p = models[asked.model].next(cache, place, asked.temperature || 1);
      state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
      let left = state / 2 ** 32, id = asked.temperature ? 0 : p.indexOf(Math.max(...p));
      if (asked.temperature) while (id < p.length - 1 && (left -= p[id]) > 0) id++;
      ids = [...ids, id];
      yield {id};
    }
    yield {done: true};
  },

  // How far the mean loss from token `first` on falls if one head is sharpened: one head a step.
  *heads(asked) {
    for (let n = -1, before; n < asked.scales.length; n++) {
      const scales = asked.scales.map((scale, m) => m === n ? scale * asked.factor : scale);
      const reading = new Reading(models[asked.model], scales, asked.cut, asked.capacity);
      reading.follow(asked.ids);
      while (reading.step().length) yield null;
      const losses = reading.losses.slice(asked.first - 1), sum = losses.reduce((a, b) => a + b);
      const loss = sum / losses.length;
      before ??= loss;
      if (n >= 0) yield {head: n, gain: before - loss};
    }
    yield {done: true};
  },
};

// One job per slot: a newer one in a slot ends the older one. Only a Web Worker does jobs.
if (typeof importScripts === 'function') {
  addEventListener('unhandledrejection', ({reason}) => { throw reason; }); // to worker.onerror
  const newest = {}, pause = () => new Promise(resume => setTimeout(resume));
  onmessage = async ({data}) => {
    if (data.packed) models.push(new Model(data.packed));
    newest[data.slot] = data.number; // without a job, it only ends the older one
    if (!data.job) return;
    await pause();
    for (const answer of JOBS[data.job](data)) {
      if (newest[data.slot] !== data.number) return; // a newer one
      if (answer) postMessage({slot: data.slot, number: data.number, ...answer});
      await pause();
    }
  };
} else if (typeof module !== 'undefined') module.exports = {Tokenizer, Model, Reading};
