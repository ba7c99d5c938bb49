"""Steps of recorded calls by drafts from text: without a grammar, with it, and with skeletons of calls as well.

    PYTHONPATH=src:tools python benchmarks/call_skeletons.py agent_traces.jsonl    # COMPACT=1: arguments without spaces
"""
# ruff: noqa
import sys, json, re
import numpy as np
from transformers import AutoTokenizer
from lookahead.demo import demo_model_path
from lookahead.drafting import AutoDrafter, DraftMemory
from lookahead.server.grammar import *
from lookahead.server import grammar as G
from lookahead.server.requests import ChatRequest
from lookahead.server.tools import HERMES, Thinking
from lookahead.drafting import TokenPaths
from playback import play_text
tok=AutoTokenizer.from_pretrained(demo_model_path())
V=len(tok)
ll=grammar_tokenizer(tok, V, [tok.eos_token_id])
S={'type':'string'}; I={'type':'integer'}
def fn(name, req, opt=(), desc=''):
    props={**{k:t for k,t in req}, **{k:t for k,t in opt}}
    return {'type':'function','function':{'name':name,'description':desc or f'{name} in the repository','parameters':{'type':'object','properties':props,'required':[k for k,_ in req]}}}
COMMON=[fn('bash',[('command',S)]),fn('find_file',[('file_name',S)],[('dir',S)]),fn('open',[('path',S)],[('line_number',I)]),fn('submit',[]),fn('create',[('filename',S)]),
 fn('goto',[('line_number',I)]),fn('scroll_up',[]),fn('scroll_down',[]),fn('search_dir',[('search_term',S)],[('dir',S)]),fn('search_file',[('search_term',S)],[('file',S)])]
EDITS={'a':fn('edit',[('search',S),('replace',S)],[('replace-all',{'type':'boolean'})]),
 'b':fn('edit',[('replacement_text',S),('start_line',I),('end_line',I)]),'c':fn('insert',[('text',S)],[('line',I)])}
CALL=re.compile(r'\{"(?:name|arguments)": .*\}')
import os
COMPACT=os.environ.get('COMPACT')=='1'
def call_text(d,final=False):
    a=json.loads(d['arguments']) if isinstance(d['arguments'],str) else d['arguments']
    return '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'%(d['name'],json.dumps(a,ensure_ascii=False,**({'separators':(',',':')} if final and COMPACT else {})))
def fix(key, val): return val
def conv(text):
    def sub(m):
        try: d=json.loads(m[0]); return call_text(d) if 'name' in d and 'arguments' in d else m[0]
        except Exception: return m[0]
    return CALL.sub(sub,text)
cases=[]
for l in open(sys.argv[1]):
    r=json.loads(l)
    m=CALL.search(r['output'])
    if not m: continue
    d=json.loads(m[0]); a=json.loads(d['arguments']) if isinstance(d['arguments'],str) else d['arguments']
    tools=list(COMMON)
    sample=EDITS['a'] if 'search' in (r['prompt']+r['output']) and '"search\\"' in (r['prompt']+r['output']) else EDITS['b']
    tools+= [sample, EDITS['c']]
    schema={t['function']['name']:t for t in tools}
    if d['name'] not in schema or not set(a)<=set(schema[d['name']]['function']['parameters']['properties']): print('skip',d['name'],list(a)); continue
    # types as in the schema, keys in its order
    props=schema[d['name']]['function']['parameters']['properties']
    a={k:(int(a[k]) if props[k]is I else str(a[k]).lower()=='true' if props[k].get('type')=='boolean' else a[k]) for k in props if k in a}
    before=r['output'][:m.start()]
    answer=before+call_text({'name':d['name'],'arguments':a},True)
    head='<|im_start|>system\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n'+'\n'.join(map(json.dumps,tools))+'\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>\n\n'
    prompt=head+conv(r['prompt'])
    first='<tool_call>' not in conv(r['prompt'])
    cases.append((r['id'],prompt,before,answer,tools,first))
def grammar(tools,choice):
    req=ChatRequest(model='m',messages=[{'role':'user','content':'x'}],tools=tools,tool_choice=choice)
    g=grammar_of(req,Thinking.NEVER,HERMES,{})
    return compile_grammar(g[0],ll,g[1])
def served_tokens(matcher,text):
    """Tokens that would be selected."""
    m=matcher.deep_copy(); out=[]; done=''
    data=text.encode(); pos=0
    while pos<len(data):
        f=[] if m.is_stopped() else m.compute_ff_tokens()
        if f: nxt=f
        else: nxt=tok(data[pos:].decode(errors='ignore'),add_special_tokens=False).input_ids[:1]
        for t in nxt:
            b=len(tok.decode([t]).encode())
            if not m.is_stopped():
                ok=m.consume_token(t)
                if not ok: raise ValueError((out[-5:],tok.decode(out[-20:]),tok.decode([t]),text))
            out.append(t); pos+=b
    return out
class Skeleton:
    """Sketch: perfect skeleton: proposes the trigger after text; alternatives of names; keys."""
    name='skeleton'
    def __init__(self,tools,earlier=()):
        self.skel=[]
        for t in tools:
            f=t['function']; keys=list(f['parameters']['properties'])
            first=''
            req=f['parameters'].get('required',[])
            self.skel.append('<tool_call>\n{"name": "%s", "arguments": {%s'%(f['name'],('"%s": %s'%(req[0],'"' if f['parameters']['properties'][req[0]]is S else '')) if req else '}}\n</tool_call>'))
        self.paths=[tok(s,add_special_tokens=False).input_ids for s in self.skel]
        self.text=[]
    def start(self,prompt): pass
    def propose(self):
        # positions: alternative starts at the root only, plus continuation inside a path
        tokens=[];parents=[];probs=[];child={}
        for p in self.paths:
            for k in range(len(p)):
                if k and self.text[-k:]!=p[:k]: continue
                node=-1
                for t in p[k:]:
                    if (node,t) not in child:
                        child[node,t]=len(tokens); tokens.append(t); parents.append(node); probs.append(0)
                    node=child[node,t]
                
        kids={}
        for i,p in enumerate(parents): kids.setdefault(p,[]).append(i)
        for p,ks in kids.items():
            for i in ks: probs[i]=(0.3 if p==-1 and not any(self.text[-k:]==q[:k] for q in self.paths for k in (1,2,3,4,5,6,7,8)) else 0.95)/len(ks)
        return TokenPaths(tokens,parents,probs)
    def observe(self,result): self.text+=list(result.tokens)
def run(cases,kind,choice,nodes=16):
    tot={True:[0,0,0],False:[0,0,0]}
    for id,prompt,before,answer,tools,first in cases:
        m=grammar(tools,choice)
        text=answer if choice=='auto' else answer[len(before):]
        ans=served_tokens(m,text)
        p=tok(prompt if choice=='auto' else prompt+before).input_ids[-6000:]
        src=[]
        if 'grammar' in kind: src.append(GrammarSource(m.deep_copy()))
        if 'skeleton' in kind: src.append(Skeleton(tools))
        st=play_text(p,ans,AutoDrafter(DraftMemory.of_texts(),nodes,sources=src))
        s=len(st.nodes_per_step)
        t=tot[first]; t[0]+=len(ans); t[1]+=s; t[2]+=1
    return tot
import lookahead.server.tools as TT
if COMPACT:
    TT.JSON_LAYOUT.update(item_separator=',', key_separator=':')
if __name__=='__main__':
    print(len(cases), sum(c[-1] for c in cases))
    for choice in ('auto','required'):
        for kind in ('','grammar','grammar skeleton'):
            r=run(cases,kind,choice)
            print(choice,kind or 'nothing',{('first' if k else 'later'):(v, round(v[0]/max(v[1],1),3)) for k,v in r.items()},flush=True)
