"""Ulysses for models of transformers, through its table of attention functions: their code is not changed."""

import importlib
import weakref

import torch

from deepspeed import comm as dist
from deepspeed._compat import backward_id
from deepspeed.comm.hosts import hosts_of
from deepspeed.comm.mesh import made_here
from deepspeed.log import log_dist_once, warning_once
from deepspeed.ops.attention import table as table_of
from deepspeed.ops.attention.blocks import Dropped
from deepspeed.sequence import exchange, methods, parallel_state, positions
from deepspeed.sequence.chunked import chunked_attention
from deepspeed.sequence.masks import Whole, allowed_of
from deepspeed.sequence.ulysses_ring import UlyssesRing

_BY_BLOCKS = {"sdpa_attention_forward": "sdpa", "flash_attention_forward": "flash attentions"}
_KEY = "core_attn_implementation", "share sequences"  # for errors
_PER_PART = ("cu_seq_lens_q", "cu_seq_lens_k", "position_bias")  # arguments that describe this rank's part only


class UlyssesSPAttentionHF(torch.nn.Module):
    """An attention function of transformers over a sequence that the ranks of ``process_group`` share.

    ``attn``: transformers' function, which gets whole sequences of some heads. ``seq_length_is_variable`` false: parts
    have ``local_seq_length`` tokens. ``disable_in_eval``: a module in eval mode attends to what it is given.
    """

    def __init__(
        self,
        attn,
        batch_size,
        attn_head_count,
        attn_head_size,
        kv_head_count,
        num_hidden_layers,
        process_group,
        seq_length_is_variable=False,
        local_seq_length=None,
        global_seq_length=None,
        disable_in_eval=False,
    ):
        super().__init__()
        self.attn, self.process_group = attn, process_group
        self.world_size, self.sp_rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        self.batch_size, self.num_hidden_layers = batch_size, num_hidden_layers
        self.attn_head_count, self.attn_head_size, self.kv_head_count = attn_head_count, attn_head_size, kv_head_count
        self.seq_length_is_variable, self.disable_in_eval = seq_length_is_variable, disable_in_eval
        self.local_seq_length, self.global_seq_length = local_seq_length, global_seq_length
        if not seq_length_is_variable:
            if local_seq_length is None or global_seq_length is None:
                raise ValueError("a fixed sequence length needs local_seq_length and global_seq_length")
            if local_seq_length * self.world_size != global_seq_length:
                raise ValueError(
                    f"local_seq_length {local_seq_length} x {self.world_size} ranks is not global_seq_length "
                    f"{global_seq_length}"
                )
        self._whole = self._first = self._positions = None
        self._ring = None  # set if not all ranks exchange heads
        self._size = None  # the number of ranks that exchange heads; found in the first forward
        self.configure()

    def configure(self, method="auto", chunk=0, offload=False):
        """As keys of the section ``sequence_parallel``; ``offload``: see ``chunked_attention``."""
        self.method, self.chunk, self.offload = method, chunk, offload
        if method == "ulysses":
            methods.exchanging(method, self.attn_head_count, ["here"] * self.world_size)

    def forward(self, module, query, key, value, attention_mask, *args, **kwargs):
        """transformers' signature: tensors are ``[batch, heads, sequence, size]``; returns ``(output, None)`` with
        ``[batch, sequence, heads, size]``."""
        if not self._shares(module):
            if self.chunk and self.world_size == 1:
                return self._alone(module, query, key, value, attention_mask, *args, **kwargs)
            return self.attn(module, query, key, value, attention_mask, *args, **kwargs)
        given = [name for name in _PER_PART if kwargs.get(name) is not None]
        if given:
            raise ValueError(
                f"the model passes {', '.join(given)} to its attention, which describe this rank's part of the "
                "sequence only: sequence parallelism reads position_ids and attention_mask instead; leave them out"
            )
        self._check(query, key)
        heads = exchange.HeadExchange(query.shape[1], key.shape[1], self.process_group)
        whole = self._whole_of(module, attention_mask, kwargs.get("position_ids"), query)
        causal, window = table_of.causal_of(module, kwargs), table_of.window_of(module, kwargs)
        odd = self._not_by_blocks(args, kwargs)
        ring = self._ring_of(query.shape[1], query.shape[2], causal, odd)
        parts = [x.transpose(1, 2) for x in (query, key, value)]
        if ring is not None:
            looks = whole.blocks(causal, window, attention_mask)
            return ring(*parts, causal, looks=looks, **_rules_of(kwargs)), None
        if self.chunk:
            _refuse_blocks(odd)
            mask = whole.blocks(causal, window, attention_mask)
        elif self._takes_padding():
            mask = whole.kept if whole.padded else None
        else:
            mask = whole.mask(causal, window, attention_mask)
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = whole.positions
        start, stop = heads.own
        sinks = kwargs.get("s_aux")
        if sinks is not None:
            kwargs["s_aux"] = sinks = sinks[start:stop]
        rules = _rules_of(kwargs, start) if self.chunk else None

        q, k, v = heads.to_heads(parts, heads_first=True)
        k, v = heads.spread(k, v)
        if stop == start:
            used = q.sum() + k.sum() + v.sum() + (0 if sinks is None else sinks.sum())
            context = used * v.new_zeros(*q.shape[:2], 0, v.shape[-1])
        else:
            alike = getattr(module, "num_key_value_groups", heads.repeats) == heads.repeats
            seen = module if alike else Seen(module, heads.repeats)
            q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
            if self.chunk:
                context = self._by_chunks(q, k, v, causal, mask, rules)
            else:
                if getattr(self.attn, "takes_first_head", False):
                    kwargs["first_head"] = start
                context = self.attn(seen, q, k, v, mask, *args, **kwargs)[0]
        return heads.to_sequence([context])[0], None

    def _shares(self, module):
        return self.world_size > 1 and not (self.disable_in_eval and not module.training)

    def demand_positions(self, model):
        """``model``, of transformers, may not be called without them in this job."""
        job = weakref.ref(made_here())
        positions.demand(model, lambda module: job() is made_here() and self._shares(module))

    def _not_by_blocks(self, args, kwargs):
        """None if attention block by block gives the result of ``attn``; else the reason why it does not."""
        if getattr(self.attn, "not_by_blocks", None):
            return self.attn.not_by_blocks
        if table_of.name_of(self.attn) not in _BY_BLOCKS:
            return f"only {' and '.join(_BY_BLOCKS.values())} are known to be computed by blocks: load with one"
        if args or kwargs.get("position_bias") is not None:
            return f"the model passes {'more than is known' if args else 'position_bias'} to its attention"
        return None

    def _ring_of(self, heads, length, causal, odd):
        """The ring that computes this attention; None where all ranks exchange heads."""
        if self.chunk:
            return None
        if self._size is None:
            self._size = methods.exchanging(self.method, heads, hosts_of(self.process_group))
            log_dist_once(methods.said(self.method, self._size, self.world_size, heads), ranks=[0])
        if self._size == self.world_size:
            return None
        if odd is None and self._ring is None:
            self._ring = UlyssesRing(self.process_group, heads, self._size)
        if odd is None and not self._ring.takes(length, causal):
            odd = f"a part of {length} tokens cannot be halved"
        if odd is None:
            return self._ring
        if self.method != "auto":
            raise ValueError(f'sequence_parallel.method "{self.method}" computes attention in a ring: {odd}')
        if heads >= self.world_size:
            warning_once(f"tokens are exchanged for heads between hosts, since no ring can compute this: {odd}")
        return None

    def _by_chunks(self, query, key, value, causal, looks, rules):
        """``[batch, sequence, heads, size]``."""
        more = {"offload": self.offload, "looks": looks, **rules}
        return chunked_attention(query, key, value, self.chunk, causal, **more).transpose(1, 2)

    def _alone(self, module, query, key, value, attention_mask, *args, **kwargs):
        """A whole sequence."""
        causal, odd = table_of.causal_of(module, kwargs), self._not_by_blocks(args, kwargs)
        if key.shape[2] != query.shape[2]:
            odd = "a cache of keys is in use"
        mask, looks = allowed_of(attention_mask), None
        if self._takes_padding() and odd is None:
            whole = self._whole_of(module, attention_mask, kwargs.get("position_ids"), query)
            looks = whole.blocks(causal, table_of.window_of(module, kwargs), attention_mask)
        elif mask is not None and (mask.dim() != 4 or mask.shape[1] != 1):
            odd = f"its mask has the shape {tuple(mask.shape)}"
        elif mask is not None:
            causal = False  # the mask says so, and what may be seen of later tokens, too

            def looks(queries, keys):
                return mask[:, :, slice(*queries), slice(*keys)]

        _refuse_blocks(odd)
        return self._by_chunks(query, key, value, causal, looks, _rules_of(kwargs)), None

    def _takes_padding(self):
        return "flash" in table_of.name_of(self.attn)

    def _check(self, query, key):
        length = query.shape[2]
        if key.shape[2] != length:
            raise ValueError(
                f"{length} queries and {key.shape[2]} keys: a cache of keys does not know that ranks share the "
                "sequence. Generate with disable_in_eval=True and the model in eval mode, or with use_cache=False"
            )
        if not self.seq_length_is_variable and length != self.local_seq_length:
            raise ValueError(
                f"this rank's part has {length} tokens in a batch of {query.shape[0]}, but register_with_transformers "
                f"was told seq_length={self.global_seq_length}, {self.local_seq_length} on each rank; pass "
                "seq_length_is_variable=True"
            )

    def _whole_of(self, module, mask, positions, query):
        """Gathered once for a forward: in its first layer. Layers that backward runs again each ask anew, since that
        may not be the last forward; what decides is the same on all ranks."""
        again = positions is None or self._positions is None or self._positions() is not positions
        first = self._first is None or self._first() is None or self._first() is module
        if again or first or backward_id() != -1 or self._whole is None:
            if first:
                self._first = weakref.ref(module)
            if first and backward_id() == -1:
                exchange.check_lengths(query.shape[2], self.process_group, query.device)
            self._positions = None if positions is None else weakref.ref(positions)
            self._whole = Whole(mask, positions, query.shape[0], query.shape[2], self.process_group, query.device)
            self._warn(positions, query.shape[2])
        return self._whole

    def _warn(self, positions, length):
        every = self._whole.positions
        beyond = bool(((every < 0) | (every >= length)).any())
        if positions is not None and not beyond and bool((every[:, ::length] == 0).all()):
            warning_once(
                f"position_ids start again at 0 in every rank's part ({length} tokens): either each part is a document "
                "of its own, or the model was called without position_ids, and made up those of a part. Pass the "
                "position_ids of the whole sequence, cut as the tokens are."
            )

    @classmethod
    def of_config(cls, attn, config, process_group, batch_size=None, **more):
        """With the heads and layers of a model's text configuration."""
        heads = config.num_attention_heads
        return cls(
            attn=attn,
            batch_size=batch_size,
            attn_head_count=heads,
            attn_head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            kv_head_count=getattr(config, "num_key_value_heads", None) or heads,
            num_hidden_layers=config.num_hidden_layers,
            process_group=process_group,
            **more,
        )

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path,
        core_attn_implementation,
        sequence_parallel_size,
        micro_batch_size,
        seq_length=None,
        seq_length_is_variable=True,
        disable_in_eval=False,
        max_length=None,
    ):
        """Makes groups of ``sequence_parallel_size`` neighbours, and the attention of one model share sequences among
        them. Returns what ``deepspeed.initialize`` takes as ``mpu``; None for size 1.

        ``model_name_or_path``: what ``from_pretrained`` will be given (models of this name are meant), or a model
        object, also one that another object such as PEFT's wraps. ``core_attn_implementation``: any attention that
        transformers has registered ("sdpa", "flash_attention_2", a hub kernel...). ``seq_length``: of whole sequences,
        where it is fixed; ``max_length`` is its older name.
        """
        if sequence_parallel_size == 1:
            return None
        seq_length = max_length if seq_length is None else seq_length
        if not seq_length_is_variable:
            if seq_length is None:
                raise ValueError("seq_length_is_variable=False needs seq_length")
            if seq_length % sequence_parallel_size:
                raise ValueError(
                    f"seq_length {seq_length} cannot be cut into {sequence_parallel_size} equal parts "
                    "(sequence_parallel_size)"
                )
        table = table_of.table()
        core = table_of.core_of(table, core_attn_implementation, *_KEY)
        config, matches = _model_of(model_name_or_path, core_attn_implementation)
        parallel_state.initialize_sequence_parallel(sequence_parallel_size)
        made = cls.of_config(
            core,
            config,
            parallel_state.get_sequence_parallel_group(),
            batch_size=micro_batch_size,
            seq_length_is_variable=seq_length_is_variable,
            local_seq_length=None if seq_length is None else seq_length // sequence_parallel_size,
            global_seq_length=seq_length,
            disable_in_eval=disable_in_eval,
        )
        table_of.install(table, core_attn_implementation, matches, made)
        if not isinstance(model_name_or_path, str):
            made.demand_positions(table_of.base_of(model_name_or_path))
        return parallel_state


def _rules_of(kwargs, first=0):
    """The ``ScoreRules`` in a model's arguments, for ring and chunks. ``first``: the number of the first head."""
    dropped = Dropped.drawn(kwargs.get("dropout") or 0.0)
    return {
        "scale": kwargs.get("scaling"),
        "soft_cap": kwargs.get("softcap") or 0.0,
        "sinks": kwargs.get("s_aux"),
        "dropped": dropped and dropped.of_heads(first),
    }


def _refuse_blocks(odd):
    if odd is not None:
        raise ValueError(f"sequence_parallel.chunk computes attention by blocks: {odd}")


class Seen:
    """An attention module with another number of repeats of key/value heads, for this rank."""

    def __init__(self, module, repeats):
        self.__dict__.update(_module=module, num_key_value_groups=repeats)

    def __getattr__(self, name):
        return getattr(self._module, name)


def share_model(model, modules, process_group):
    """``modules``, attention of a transformers ``model``, share sequences among the ranks of ``process_group``, with
    the attention function that the model has."""
    table = table_of.table()
    config, name = model.config.get_text_config(), model.config._attn_implementation
    core, own = table_of.core_of(table, name, *_KEY), weakref.WeakSet(modules)
    made = UlyssesSPAttentionHF.of_config(core, config, process_group, seq_length_is_variable=True)
    table_of.install(table, name, lambda module: module in own, made)
    made.demand_positions(model)
    return made


def configure_model(model, process_group, **how):
    """All attention of a transformers ``model`` as ``how`` says (``UlyssesSPAttentionHF.configure``), shared among the
    ranks of ``process_group``: as it was registered, where it was."""
    table, model = table_of.table(), table_of.base_of(model)
    modules = list(model.modules())
    here = table_of.installed(table, model.config._attn_implementation, modules)
    made = here[0] if here else share_model(model, modules, process_group)
    made.configure(**how)
    return made


def _model_of(model, name):
    """``(configuration of the text model, whether an attention module belongs to it)``."""
    if isinstance(model, str):
        config = importlib.import_module("transformers").AutoConfig.from_pretrained(model)
        return config.get_text_config(), lambda module: _path_of(getattr(module, "config", None)) == model
    base = table_of.base_of(model)
    if not hasattr(base, "config") or not isinstance(base, torch.nn.Module):
        raise ValueError(
            f"model_name_or_path is a {type(model).__name__}: it must be a name, a path, or a model with a config"
        )
    own = weakref.WeakSet(base.modules())
    if getattr(base.config, "_attn_implementation", name) != name and hasattr(base, "set_attn_implementation"):
        base.set_attn_implementation(name)
    return base.config.get_text_config(), lambda module: module in own


def _path_of(config):
    return getattr(config, "_name_or_path", None) or getattr(config, "name_or_path", None)
