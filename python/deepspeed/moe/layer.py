"""The mixture-of-experts layer, which replaces a feed-forward layer."""

import torch

from deepspeed.comm.mesh_views import PIPELINE, ask_mpu
from deepspeed.log import log_dist
from deepspeed.moe.errors import fail
from deepspeed.moe.experts import Experts
from deepspeed.moe.gating import NOISE
from deepspeed.moe.mappings import tensor_ranks
from deepspeed.moe.replaced import share_anew
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from deepspeed.utils import groups
from deepspeed.zero.parameters.param_ranks import ParamRanks


class MoE(torch.nn.Module):
    """``num_experts`` copies of ``expert``, of which each token uses ``k``.

    Args:
        hidden_size: width of a token, before and after an expert.
        expert: any module that treats tokens one by one; the experts are copies of it.
        num_experts: over all ranks; a list of one number is that number.
        ep_size: ranks that share the experts, ``num_experts / ep_size`` each. Layers may differ.
        k: experts of a token.
        capacity_factor, eval_capacity_factor, min_capacity: an expert takes at most
            ``max(ceil(tokens / num_experts * factor * k), min_capacity)`` of a rank's tokens.
        use_residual: adds a dense expert, ``mlp``; ``coefficient`` says how much of both a token gets.
        noisy_gate_policy: "Jitter", "RSample" or None: noise of the gate in training.
        drop_tokens: False: experts take all tokens that choose them.
        use_rts: in training (k = 1) a full expert keeps random tokens, else the first ones.
        use_tutel: accepted; tokens are routed by kernels of this library.
        enable_expert_tensor_parallelism: the ranks that split single weights split experts, too; else each of them
            works on a part of the tokens.
        top2_2nd_expert_sampling: with k = 2 the second expert is drawn in training.
        balance, aux_scope, z_loss_coeff: ours; see ``TopKGate``.

    ``forward`` returns ``(output, auxiliary loss, rows that each expert was chosen for)``; add the loss, times a
    coefficient, to the model's.
    """

    def __init__(
        self,
        hidden_size,
        expert,
        num_experts=1,
        ep_size=1,
        k=1,
        capacity_factor=1.0,
        eval_capacity_factor=1.0,
        min_capacity=4,
        use_residual=False,
        noisy_gate_policy=None,
        drop_tokens=True,
        use_rts=True,
        use_tutel=False,
        enable_expert_tensor_parallelism=False,
        top2_2nd_expert_sampling=True,
        balance="aux",
        aux_scope="rank",
        z_loss_coeff=0.0,
    ):
        super().__init__()
        if isinstance(num_experts, (list, tuple)):
            if len(num_experts) != 1:
                fail("", f"num_experts={num_experts}: one number for one layer")
            num_experts = num_experts[0]
        if ep_size < 1 or num_experts < 1 or num_experts % ep_size != 0:
            fail("", f"Number of experts ({num_experts}) should be divisible by expert parallel size ({ep_size})")
        if noisy_gate_policy not in NOISE:
            fail("", f"Unsupported noisy_gate_policy: {noisy_gate_policy}; it is 'Jitter', 'RSample' or None")
        self.use_residual, self.enable_expert_tensor_parallelism = use_residual, enable_expert_tensor_parallelism
        self.stages = None  # of the pipeline that the layer is in; the pipeline engine sets it
        self.ep_size, self.expert_group_name = ep_size, f"ep_size_{ep_size}"
        self.num_experts, self.num_local_experts = num_experts, num_experts // ep_size
        log_dist(
            f"MoE layer: {num_experts} experts, {self.num_local_experts} of them on each of {ep_size} ranks", ranks=[0]
        )
        self.deepspeed_moe = MOELayer(
            TopKGate(
                hidden_size,
                num_experts,
                k,
                capacity_factor,
                eval_capacity_factor,
                min_capacity,
                noisy_gate_policy,
                drop_tokens,
                use_rts,
                None,
                top2_2nd_expert_sampling,
                balance,
                aux_scope,
                z_loss_coeff,
            ),
            Experts(expert, self.num_local_experts, self.expert_group_name),
            self.expert_group_name,
            self.ep_size,
            self.num_local_experts,
            use_tutel=use_tutel,
        )
        self._number_experts(0)
        if self.use_residual:
            self.mlp = expert
            self.coefficient = torch.nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_=False):
        """Makes the groups of ranks that share experts; every rank calls it. ``deepspeed.initialize`` does.

        ``use_data_before_expert_parallel_``: ranks with the same experts are neighbours.
        """
        name = self.expert_group_name
        if name not in groups._get_expert_parallel_group_dict():
            unit = groups if groups.mpu is None and tensor_ranks() > 1 else groups.mpu  # with autotp_size
            if unit is None or not self.enable_expert_tensor_parallelism:
                groups._create_expert_and_data_parallel(
                    self.ep_size,
                    pp_size=self.stages or ask_mpu(groups.mpu, "world_size", PIPELINE),
                    use_data_before_expert_parallel_=use_data_before_expert_parallel_,
                )
            else:
                groups._create_expert_data_and_model_parallel(
                    self.ep_size, unit, use_data_before_expert_parallel_=use_data_before_expert_parallel_
                )
        self.deepspeed_moe._set_ep_group(groups._get_expert_parallel_group(name))
        self._number_experts(groups._get_expert_parallel_rank(name))
        if self.ep_size == 1:
            return
        copies = groups._get_expert_data_parallel_group(name)
        ranks = {
            "edp": groups._get_expert_data_parallel_group_ranks(name),
            "ep": groups._get_expert_parallel_group_ranks(name),
        }
        share_anew(self.deepspeed_moe.experts, copies)
        for param in self.deepspeed_moe.experts.parameters():
            if groups.mpu is not None and not self.enable_expert_tensor_parallelism:
                param.model_parallel = True  # another one on each tensor-parallel rank
            param.ds_ranks = ParamRanks(f"experts.{name}", ranks, copies)

    def _number_experts(self, rank):
        """The global numbers of this rank's experts, under which checkpoints name them."""
        first = rank * self.num_local_experts
        self.deepspeed_moe.experts.deepspeed_experts.ds_expert_numbers = {
            str(local): first + local for local in range(self.num_local_experts)
        }

    def forward(self, hidden_states, used_token=None):
        """``hidden_states``: [..., hidden_size]. ``used_token``: one number for each token, 0 for those that no expert
        shall see; their output is 0."""
        if not self.use_residual:
            output = self.deepspeed_moe(hidden_states, used_token)
        else:
            dense = []  # the dense expert runs during the exchange of rows, if there is one
            output = self.deepspeed_moe(hidden_states, used_token, beside=lambda: dense.append(self.mlp(hidden_states)))
            dense = dense[0] if dense else self.mlp(hidden_states)
            dense = dense[0] if isinstance(dense, tuple) else dense
            share = torch.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * share[..., 0:1] + dense * share[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts
