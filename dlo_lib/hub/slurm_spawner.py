"""batchspawner's SlurmSpawner, which also remembers why SLURM ended a server; it imports batchspawner."""

from __future__ import annotations

from typing import ClassVar

from batchspawner import SlurmSpawner

ALIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED")


class JobSpawner(SlurmSpawner):
    """Start the server of a user as a job.

    Attributes:
        endings: user → what SLURM says about the user's last job, after it has ended. It belongs to the
            class, because the Hub creates a new object for the next server.
    """

    endings: ClassVar[dict[str, str]] = {}
    job_id: str
    job_status: str

    async def poll(self) -> int | None:
        """Return None while the job waits or runs.

        batchspawner takes a failed question to SLURM as the end of the job, also while the Hub stops, and the
        Hub then forgets a server that runs. So a second question decides.
        """
        job, known = self.job_id, self.job_status
        status: int | None = await super().poll()
        if status is None or not job:
            return status
        try:
            said = await self.run_command(f"scontrol show job -o {job}")
        except RuntimeError as error:
            said = "" if "Invalid job id" in str(error) else None  # SLURM forgets jobs after some minutes
        if said is None or any(f"JobState={state} " in said for state in ALIVE):
            self.job_id, self.job_status = job, known
            return None
        self.endings[self.user.name] = said
        self.log.info("job %s of %s has ended: %s", job, self.user.name, said)
        return status

    async def start(self) -> tuple[str, int]:
        """Submit the job and wait for the server."""
        self.endings.pop(self.user.name, None)
        return await super().start()
