"""The configuration files of a virtual SLURM cluster, and how its programs see their machine."""

ENTER = """\
#!/bin/sh
# Run a command as on a machine of the cluster: with its host names and users, in a private mount namespace.
set -e
{mounts}
exec "$@"
"""
OPEN = """\
mkdir -p '{aside}'
mount --bind '{prefix}' '{aside}'
mount -t tmpfs -o mode=755 none '{closed}'
mkdir -p '{prefix}'
mount --bind '{aside}' '{prefix}'"""
"""Shows the users of the cluster the Python at ``prefix``, below a folder that only its owner may enter."""

SLURM_CONF = """\
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={d}/sock/munge.sock,cred_expire=10
StateSaveLocation={d}/state
SlurmdSpoolDir={d}/spool.%n
SlurmctldPidFile={d}/run/slurmctld.pid
SlurmdPidFile={d}/run/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
PropagateResourceLimits=NONE
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=2
JobRequeue=1
FirstJobId={first}
InactiveLimit=0
KillWait=3
MinJobAge=3600
SlurmctldTimeout=60
SlurmdTimeout=60
"""

ACCOUNTING_CONF = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={d}/sock/munge.sock
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations,limits,qos
"""

SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={d}/sock/munge.sock
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
PidFile={d}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={store}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm_acct_db
"""
