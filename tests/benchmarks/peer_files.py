"""Makes what the peers need: an environment each, and their forms of the Qwen pair. Idempotent; minutes to an hour.

python -m tests.benchmarks.peer_files [--into FOLDER] [--only llama openvino]

    llama/      a virtual environment with llama-cpp-python, built for this machine
    openvino/   one with openvino-genai, and optimum-intel for the export
    files/      NAME-q8_0.gguf, NAME-int4/ and NAME-int8/

Every form is made from the same bf16 weights as the models that transformers and fastdraft load. Q4_K_M is the file
that these were converted from, so llama.cpp loses nothing there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from fastdraft.models.store import cache_dir, fetch, load_path

PAIR = ("qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-0.5b-instruct")
BITS = ("int4", "int8")

PACKAGES = {
    "llama": ["llama-cpp-python==0.3.*"],
    # torch first: torchvision, which optimum-intel wants, must fit it.
    "openvino": ["optimum-intel==2.2.*", "transformers==5.5.*", "openvino", "openvino-genai", "openvino-tokenizers"],
}


def default_folder() -> Path:
    """Where the peers' environments and files are unless said otherwise."""
    return cache_dir() / "peers"


def interpreter(peers: Path, peer: str) -> Path:
    """The Python of a peer's environment."""
    return peers / peer / "bin" / "python"


def model_file(peers: Path, name: str, form: str) -> Path:
    """A peer's form of a model: ``q4_k_m``, ``q8_0``, ``int4`` or ``int8``."""
    if form == "q4_k_m":
        return fetch(name)
    return peers / "files" / (f"{name}-{form}.gguf" if form == "q8_0" else f"{name}-{form}")


def make_environment(peers: Path, peer: str) -> None:
    """A virtual environment with the peer in it."""
    python = interpreter(peers, peer)
    if (peers / peer / ".installed").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", peers / peer], check=True)
    build = os.environ | {"CMAKE_ARGS": "-DGGML_NATIVE=ON", "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count())}
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES[peer]], check=True, env=build)
    (peers / peer / ".installed").touch()


def write_q8_0(source: Path, file: Path) -> None:
    """Rounds a gguf's weights to bf16, as the conversion for transformers does, and these to Q8_0."""
    import gguf
    import torch

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(file.with_suffix(".part"), reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = gguf.LlamaFileType.MOSTLY_Q8_0 if name == "general.file_type" else field.contents()
        kinds = [*field.types, None]
        writer.add_key_value(name, value, kinds[0], kinds[1])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        rounded = torch.from_numpy(values.copy()).to(torch.bfloat16).float().numpy()
        if rounded.ndim == 1:
            writer.add_tensor(tensor.name, rounded)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(tensor.name, gguf.quants.quantize(rounded, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file.with_suffix(".part").rename(file)


def export_openvino(peers: Path, name: str, form: str) -> None:
    """Exports with optimum-intel: int4 in groups of 64 for every layer, or int8 for each channel."""
    folder = model_file(peers, name, form)
    part = folder.with_name(folder.name + ".part")
    command = [interpreter(peers, "openvino").with_name("optimum-cli"), "export", "openvino"]
    command += ["--model", load_path(name), "--task", "text-generation-with-past", "--weight-format", form]
    command += ["--group-size", "64", "--ratio", "1.0"] if form == "int4" else []
    subprocess.run([*command, part], check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    part.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=default_folder())
    parser.add_argument("--only", nargs="*", choices=sorted(PACKAGES), default=sorted(PACKAGES))
    args = parser.parse_args()
    (args.into / "files").mkdir(parents=True, exist_ok=True)
    for peer in args.only:
        make_environment(args.into, peer)
    if "llama" in args.only:
        file = model_file(args.into, PAIR[0], "q8_0")
        if not file.exists():
            write_q8_0(fetch(PAIR[0]), file)
    if "openvino" in args.only:
        for name in PAIR:
            for form in BITS:
                if not model_file(args.into, name, form).exists():
                    export_openvino(args.into, name, form)


if __name__ == "__main__":
    main()
