"""Names of launchers and numbers that scripts import."""

PDSH_LAUNCHER = "pdsh"
OPENMPI_LAUNCHER = "openmpi"
MPICH_LAUNCHER = "mpich"
IMPI_LAUNCHER = "impi"
SLURM_LAUNCHER = "slurm"
MVAPICH_LAUNCHER = "mvapich"
SSH_LAUNCHER = "ssh"

PDSH_MAX_FAN_OUT = 1024
MVAPICH_TMP_HOSTFILE = "/tmp/deepspeed_mvapich_hostfile"
ELASTIC_TRAINING_ID_DEFAULT = "123456789"
