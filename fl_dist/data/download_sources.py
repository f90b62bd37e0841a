"""Where the data sets are published: addresses, checksums, and the folder below `root` in which readers look."""

from dataclasses import dataclass
from pathlib import Path

FETCH_COMMAND = "fl-dist data fetch"


@dataclass(frozen=True)
class File:
    url: str
    md5: str
    contents: tuple[str, ...] = ()
    """Files or folders of an archive, which show that it is already present."""

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Source:
    title: str
    folder: str
    """Below root: for the contents of archives, or the files themselves."""
    files: tuple[File, ...] = ()
    rows: tuple[int, int] | None = None
    """Published numbers of training and test rows."""
    images: int | None = None
    """Published number of images in all domains."""
    page: str = ""
    """Where to get it by hand, if nothing can be downloaded directly."""


def _idx_files(base: str, *checksums: str) -> tuple[File, ...]:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(File(f"{base}/{name}-ubyte.gz", md5) for name, md5 in zip(names, checksums, strict=True))


_CIFAR = "https://www.cs.toronto.edu/~kriz"
_CINIC = "https://datashare.ed.ac.uk/bitstream/handle/10283/3192"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_TINY = "http://cs231n.stanford.edu"
_VISDA = "http://csr.bu.edu/ftp/visda/2019/multi-source"
_NEWS = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv"

SOURCES = {
    "cifar10": Source(
        "CIFAR-10",
        ".",
        (File(f"{_CIFAR}/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", ("cifar-10-batches-bin",)),),
        (50000, 10000),
    ),
    "cifar100": Source(
        "CIFAR-100",
        ".",
        (File(f"{_CIFAR}/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", ("cifar-100-binary",)),),
        (50000, 10000),
    ),
    "cinic10": Source(
        "CINIC-10",
        "cinic-10",
        (File(f"{_CINIC}/CINIC-10.tar.gz", "6ee4d0c996905fe93221de577967a372", ("train", "test")),),
        (90000, 90000),
    ),
    "mnist": Source(
        "MNIST",
        "MNIST/raw",
        _idx_files(
            _MNIST,
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
        (60000, 10000),
    ),
    "fashion_mnist": Source(
        "Fashion-MNIST",
        "FashionMNIST/raw",
        _idx_files(
            _FASHION,
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
        (60000, 10000),
    ),
    "emnist": Source(
        "EMNIST",
        "EMNIST",
        (File("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e", ("gzip",)),),
        (697932, 116323),
    ),
    "tiny_imagenet": Source(
        "Tiny-ImageNet",
        ".",
        (File(f"{_TINY}/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de", ("tiny-imagenet-200",)),),
        (100000, 10000),
    ),
    "ag_news": Source(
        "AG News",
        "ag_news_csv",
        (
            File(f"{_NEWS}/train.csv", "b1a00f826fdfbd249f79597b59e1dc12"),
            File(f"{_NEWS}/test.csv", "d52ea96a97a2d943681189a97654912d"),
        ),
        (120000, 7600),
    ),
    "domainnet": Source(
        "DomainNet",
        "DomainNet",
        (
            File(f"{_VISDA}/groundtruth/clipart.zip", "cd0d8f2d77a4e181449b78ed62bccf1e", ("clipart",)),
            File(f"{_VISDA}/infograph.zip", "720380b86f9e6ab4805bb38b6bd135f8", ("infograph",)),
            File(f"{_VISDA}/groundtruth/painting.zip", "1ae32cdb4f98fe7ab5eb0a351768abfd", ("painting",)),
            File(f"{_VISDA}/quickdraw.zip", "bdc1b6f09f277da1a263389efe0c7a66", ("quickdraw",)),
            File(f"{_VISDA}/real.zip", "dcc47055e8935767784b7162e7c7cca6", ("real",)),
            File(f"{_VISDA}/sketch.zip", "658d8009644040ff7ce30bb2e820850f", ("sketch",)),
        ),
        images=586575,
    ),
    "officehome": Source(
        "Office-Home", "OfficeHome", images=15588, page="https://www.hemanthdv.org/officeHomeDataset.html"
    ),
    "pacs": Source(
        "PACS",
        "PACS",
        images=9991,
        page="https://github.com/facebookresearch/DomainBed (domainbed/scripts/download.py)",
    ),
}


def find_folder(root: Path, name: str) -> Path:
    """The folder of that name in root, or root itself if there is none."""
    folder = root / name
    return folder if folder.is_dir() else root


def missing_data_message(name: str, root: Path, missing: str) -> str:
    """What is missing, where, and how to get it."""
    source = SOURCES[name]
    remedy = f"{FETCH_COMMAND} {name} --root {root}" if source.files else f"{source.page}, into {root / source.folder}"
    return f"no {source.title} in {root}: {missing} is missing; download it ({remedy}), or set data.root to its folder"


def redownload_hint(name: str) -> str:
    """The remedy for damaged files."""
    has_files = bool(SOURCES[name].files)
    return f"download it again ({FETCH_COMMAND} {name} --again, with its --root)" if has_files else "extract it again"
